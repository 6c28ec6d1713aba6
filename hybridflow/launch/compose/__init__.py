"""The command line and configuration files become one checked, sealed configuration; nothing is started."""
