"""What a built model does besides training: scoring, decoding, the check of FP8."""
