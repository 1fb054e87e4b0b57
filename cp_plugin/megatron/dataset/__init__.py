"""Text files to Megatron datasets in one pass, with Megatron's own writer and tokenizers.

sources.find -> documents.read -> tokenize in worker processes -> write in order -> rename when complete
"""
