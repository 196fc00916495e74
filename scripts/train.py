"""`lavis-ds train` for launchers: see `python scripts/train.py --help`."""

from lavis_ds.cli import script

if __name__ == "__main__":
    script("train")
