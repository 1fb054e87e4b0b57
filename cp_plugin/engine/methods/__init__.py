"""Context-parallel methods, one file each: who sends what when. A file lists its ``Provider``s in ``PROVIDERS``."""
