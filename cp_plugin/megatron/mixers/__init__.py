"""The layers of Megatron that mix tokens, one file each; the specs that hold them, and quantisation of attention."""
