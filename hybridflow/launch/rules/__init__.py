"""Rules that need the dataflow's class. Each yields all errors that it finds, so that they can be reported at once."""
