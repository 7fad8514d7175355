"""The command line, and a folder per larger subcommand: convert, data, doctor, from-verl, plan, rehearse, serve."""
