"""Sparse language models: balance of their experts, and dense models made sparse."""
