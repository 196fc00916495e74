"""`lavis-ds evaluate` for launchers: see `python scripts/evaluate.py --help`."""

from lavis_ds.cli import script

if __name__ == "__main__":
    script("evaluate")
