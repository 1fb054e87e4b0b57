"""From the command line to the first step: what ranks agree on, what is loaded, what ends a run."""
