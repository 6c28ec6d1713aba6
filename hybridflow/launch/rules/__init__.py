"""Rules that need the dataflow's class. Each yields the errors it finds, so that all of them can be told at once."""
