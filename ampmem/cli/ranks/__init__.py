"""Several processes of one script: started by a launcher that is run here, or by the script itself."""
