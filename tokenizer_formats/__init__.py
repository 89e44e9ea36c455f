"""Files of tokenizers, and tokenizers of Hugging Face's library."""
