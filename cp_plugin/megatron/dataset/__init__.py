"""Text files to Megatron datasets: ``.bin`` and ``.idx`` by Megatron's own writer and tokenizers, in one pass.

sources.find -> documents.read -> tokenized by worker processes -> written in order -> renamed when complete
"""
