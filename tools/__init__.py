"""Programs for maintainers: what a release needs."""
