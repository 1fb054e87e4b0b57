"""A model divided over devices: parameters, memory, and what an iteration takes around attention."""
