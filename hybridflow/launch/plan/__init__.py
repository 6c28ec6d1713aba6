"""A configuration becomes a plan: the dataflow, its roles, their data and the defaults of the device."""
