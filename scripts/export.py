"""`lavis-ds export` for launchers: see `python scripts/export.py --help`."""

from lavis_ds.cli import script

if __name__ == "__main__":
    script("export")
