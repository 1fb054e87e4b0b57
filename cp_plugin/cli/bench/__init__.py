"""``cp-plugin bench``: every method and every upstream peer, on real ranks: right first, then how fast."""
