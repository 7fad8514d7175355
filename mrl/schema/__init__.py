"""How a config becomes typed values, and a name in it code."""
