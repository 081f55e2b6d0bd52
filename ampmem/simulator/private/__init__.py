"""The parts of torch that torch does not promise and that the simulated device stands on."""
