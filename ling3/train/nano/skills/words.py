"""The vocabulary of the skills: 192 keys and 64 values, each a single token that no word problem uses."""

KEYS = tuple(
    """
    acorn alder amber anchor ant anvil arrow ash aspen badger basil bat bay beach bean bear beaver beech bell bird
    bison boat bone brook broom brush bull cabin camel candle canoe canyon carp castle cat cave cedar cello chain chair
    cherry chest cliff cloud clover coast comet coral corn crab crane creek crow cup dam deer delta desert dog dolphin
    donkey door dove drum duck dune eagle eel elk elm falcon farm fern fig finch fir fjord flute fox frog garden gate
    gecko glacier goat goose grape grove gull hall hammer harbor hare harp hawk hazel hen heron hill holly horn horse
    inlet iris island ivy jay kettle key kite koala lake lamb lamp lark laurel lemon lily lion lizard llama lynx maple
    marsh meadow melon mill mint mole moon moose moss moth mouse mule nest newt oak oasis olive otter owl ox palm panda
    parrot path peach peak pepper pier pike pine plain pond pony poplar port quail rabbit ram raven reed reef ridge
    river robin rook root rose sage salmon seal shark sheep shore shrimp skunk sloth snail snake sparrow spider spruce
    squid stork stream swan thorn thrush tiger toad
    """.split()  # noqa: SIM905 -- a block of words reads better than a list of strings
)

VALUES = tuple(
    """
    agate bamboo brass brick bronze canvas chalk clay coal cobalt copper cork cotton crystal denim dust felt flint foam
    glass gold granite gravel hemp ice iron ivory jade lace lava lead leather linen marble mercury mud nickel nylon oil
    onyx opal paper pearl plaster quartz resin rubber ruby rust salt sand satin silk silver slate smoke steam steel tar
    timber tin velvet wax wool
    """.split()  # noqa: SIM905 -- a block of words reads better than a list of strings
)
