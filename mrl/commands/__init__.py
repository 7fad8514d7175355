"""The command line, and one folder for each word of it: convert, doctor, from-verl, plan, rehearse, serve."""
