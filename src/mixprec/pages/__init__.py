"""Self-contained HTML pages: one file, no network, made from the data of a run."""
