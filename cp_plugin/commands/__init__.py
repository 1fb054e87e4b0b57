"""Commands of ``cp-plugin`` that bring parts together which know nothing of each other."""
