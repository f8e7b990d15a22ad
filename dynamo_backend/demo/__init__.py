"""The demo, `python -m torch_mlc demo`: a small GPT trained and sampled through backend "mlc"."""
