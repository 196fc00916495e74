"""A trained model as a Hugging Face folder: what it becomes, how it is written, and the proof that it is the same."""
