"""From files and `--options` to checked, typed, frozen configuration objects. No torch is imported here."""
