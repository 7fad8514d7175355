"""The command line, and one folder for each larger subcommand: convert, doctor, from-verl, plan, rehearse, serve."""
