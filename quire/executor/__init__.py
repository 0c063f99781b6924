"""How a plan reaches the workers: in this process, in others, on other machines."""
