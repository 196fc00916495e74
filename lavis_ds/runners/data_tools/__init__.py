"""What the commands `lavis-ds data ...` do: look at samples, count tokens, build indices, write shards."""
