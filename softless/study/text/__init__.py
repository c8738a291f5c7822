"""The study of a text: language models that differ only in attention, their perplexity, recall and decoding cost."""
