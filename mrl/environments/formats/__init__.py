"""How a model writes that it calls a tool, one file for each format, named as verl and vLLM do."""
