"""How one logical array is stored as N equal shards."""

from wusharding.formats.format import LANES as LANES
from wusharding.formats.format import SUBLANES as SUBLANES
from wusharding.formats.format import Format as Format
from wusharding.formats.format import has_whole_tiles as has_whole_tiles
