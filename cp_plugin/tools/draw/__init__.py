"""Pictures drawn from the code that training uses: which rank computes what and when.

They are recorded from the method itself, for any provider, and need matplotlib (``pip install 'cp-plugin[plot]'``).
Equal calls write equal bytes, so pictures can be committed.
"""
