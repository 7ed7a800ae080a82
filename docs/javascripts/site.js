// From a file the search finds no index, so it is not shown.
if (location.protocol === "file:") document.documentElement.classList.add("no-server")
