"""From a module and an example batch to one joint graph of forward and backward."""
