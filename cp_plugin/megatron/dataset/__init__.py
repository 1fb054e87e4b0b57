"""Text files to Megatron datasets: ``.bin`` and ``.idx`` by Megatron's own writer and tokenizers, resumable.

sources.find -> plan (shards of pieces of files) -> check every shard -> tokenize each that is missing -> join
                                                    \\______ worker processes (pool, work) ______/
"""
