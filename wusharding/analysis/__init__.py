"""Facts and decisions about an update. Moves no data and needs no devices."""
