"""``cp-plugin bench``: every method and every upstream peer on real ranks: correct first, then fast."""
