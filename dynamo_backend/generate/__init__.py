"""Language models from weights to text: model, caches, sampling, admission of prompts."""
