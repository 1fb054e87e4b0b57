"""From the command line to the first step: agreement of ranks, checkpoints, failure reports."""
