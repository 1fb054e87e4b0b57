"""Context-parallel methods: who sends what when. One file each; each lists its ``Provider``s in ``PROVIDERS``."""
