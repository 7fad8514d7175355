"""What `mrl doctor` looks at, one noun in each file; `mrl/doctor.py` puts it together."""
