"""Files of weights that others made, read tensor by tensor and renamed to ours."""
