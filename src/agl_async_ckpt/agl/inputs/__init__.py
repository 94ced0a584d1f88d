"""Where the inputs come from, and where a run stands in them."""
