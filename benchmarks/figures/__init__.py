"""The figures of the documents, each made by a function: `python -m benchmarks.figures` writes docs/figures/*.svg."""
