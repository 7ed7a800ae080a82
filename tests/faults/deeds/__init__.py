"""What faults do in the cases of the table, a file for each class: functions of the run that they strike."""
