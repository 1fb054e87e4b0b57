"""``cp-plugin bench``: every method and every upstream peer on real ranks, checked and then timed."""
