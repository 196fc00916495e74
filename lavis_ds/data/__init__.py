"""From annotation files to batches: formats, builders, processors, the order of samples, and the loader."""
