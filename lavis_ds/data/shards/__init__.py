"""WebDataset shards: tar files whose members `KEY.EXT` with the same key make up a sample.

`urls` names them, `source` reads their bytes from wherever they lie, `index` knows where each member starts, `stream`
goes through those that can't be indexed, `write` makes them. Format: https://github.com/webdataset/webdataset.
"""
