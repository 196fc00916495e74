"""Vision encoders, projectors, language models, and the models composed of them."""
