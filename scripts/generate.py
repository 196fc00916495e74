"""`lavis-ds generate` for launchers: see `python scripts/generate.py --help`."""

from lavis_ds.cli import script

if __name__ == "__main__":
    script("generate")
