"""`lavis-ds report` for launchers: see `python scripts/report.py --help`."""

from lavis_ds.cli import script

if __name__ == "__main__":
    script("report")
