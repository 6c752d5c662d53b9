"""How one logical array is stored as N equal shards."""

from wusharding.formats.format import Format as Format
