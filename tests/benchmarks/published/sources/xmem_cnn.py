"""Convolutional networks that xMem's authors trained in FP32 on two GPUs, and what three predictors said of each run.

Measured was the driver's peak less what was in use at the start, which is what the allocator reserved. Where a file
does not say when gradients were zeroed, it is taken to be before each step.

Some configurations were run two or three times without a limit: of the six that were looked at, the figures are equal
to the byte, and one of each is a row.

What a run is taken to reserve, and the range about it, were chosen with the models in ``CHOSEN_WITH`` alone. The
figures of most of the others had been seen before.
"""

from published.runs import PublishedRun
from published.sources.xmem import published

_STUDIES = {"anova": "001-Anova/CNN", "random": "002-Monte Carlo/CNN/001"}
CHOSEN_WITH = frozenset({"ConvNeXtTiny", "MnasNet", "MobileNetV3Small", "RegNetY400MF", "ResNet101", "VGG16"})
_WHY = (
    "possible: workspaces that find no room in the cache, or leave blocks there; only cuDNN knows their sizes, which "
    "are others from one batch size to the next"
)

# study/run, GPU, bytes (- where it ran out of memory), and what xMem, DNNMem and SchedTune said
LISTED = """
anova/001/ConvNeXtTiny_SGD_200_1_6bf5 rtx3060 3319791616 3523215360 2472542208 3096738529
anova/001/ConvNeXtTiny_SGD_300_1_af6c rtx3060 4833935360 4976541696 3523215360 4611154903
anova/001/MnasNet_AdamW_200_1_8115 rtx3060 2246049792 1929379840 1803550720 2696675328
anova/001/MnasNet_SGD_300_1_f23a rtx3060 3238002688 2728394752 2560622592 3592452833
anova/001/MnasNet_SGD_400_1_d110 rtx3060 3676307456 3621781504 3395289088 4021676933
anova/001/MnasNet_SGD_700_1_4901 rtx3060 5928648704 6142558208 5750390784 8559955804
random/MnasNet_SGD_323_1_1518 rtx3060 3514826752 2975858688 2799697920 3536228188
random/MobeNetV3Small_SGD_258_1_174a rtx3060 878706688 973078528 828375040 2039637606
random/MobileNetV2_AdamW_251_1_2d72 rtx3060 4148166656 3684696064 2696937472 3561960243
random/RegNetX400MF_Adam_382_1_5c44 rtx3060 2388656128 2264924160 2195718144 2781788242
random/RegNetY400MF_SGD_503_1_cb3f rtx3060 3592421376 3361734656 3560964096 3962547732
random/ResNet101_SGD_351_1_c2f6 rtx3060 8468299776 8824815616 8516534272 10306851963
random/ResNet152_Adam_326_1_c6f0 rtx3060 11165237248 11379146752 10787749888 10830017987
random/VGG16_SGD_684_1_90b2 rtx3060 11804868608 12119441408 9791602688 10817550418
random/VGG19_Adam_339_1_4ec5 rtx3060 9898557440 8847884288 5744099328 8499673169
random/VGG19_AdamW_377_1_f9ca rtx3060 10867441664 9707716608 6264193024 10007126999
anova/002/ConvNeXtBase_SGD_200_1_6aca rtx3060 6782189568 7075790848 5035261952 7612022129
anova/001/ConvNeXtBase_SGD_400_1_5a47 rtx3060 - 12733906944 8977907712 10323157320
random/ConvNeXtTiny_AdamW_261_0_67d3 rtx4060 4450156544 4433379328 3139436544 3719236157
random/ConvNeXtTiny_Adam_420_1_5c17 rtx3060 6673137664 6826229760 4726980608 5319992279
random/MnasNet_Adagrad_469_0_bb32 rtx4060 4217372672 4215275520 3927965696 4271342879
random/MobeNetV3Large_SGD_603_1_f8b5 rtx3060 5425332224 5297405952 4534042624 4677351506
random/MobeNetV3Small_Adam_466_1_a705 rtx3060 1528823808 1562378240 1319108608 2521101763
random/MobileNetV2_Adagrad_317_1_b2b1 rtx3060 5228199936 4638900224 3393191936 3982544077
random/MobileNetV2_AdamW_415_0_9c4b rtx4060 5926551552 5909774336 4305453056 4425494036
random/MobileNetV2_SGD_712_1_8889 rtx3060 10053746688 9969860608 7272923136 9115197768
random/RegNetX400MF_RMSprop_616_1_539e rtx3060 3594518528 3298820096 3269459968 4018027889
random/RegNetX400MF_SGD_650_0_8d01 rtx4060 3651141632 3437232128 3430940672 3774485627
random/RegNetY400MF_RMSprop_312_1_1798 rtx3060 2118123520 2095054848 2208301056 2713368658
random/RegNetY400MF_Adam_698_0_6d34 rtx4060 5196742656 4439670784 4628414464 4425494036
random/ResNet101_SGD_399_0_d75e rtx4060 - 8438939648 8436842496 10736579379
random/VGG16_Adagrad_480_1_8d25 rtx3060 9730785280 9787408384 7233077248 10677167063
random/VGG19_RMSprop_522_1_be55 rtx3060 10984882176 10940841984 8151629824 10677167063
anova/001/MnasNet_AdamW_500_1_03d3 rtx3060 4290772992 4479516672 4185915392 4677351505
anova/001/MnasNet_AdamW_600_1_dcc6 rtx3060 5089787904 5305794560 4932501504 5556823654
anova/001/MnasNet_RMSprop_400_1_2671 rtx3060 3695181824 3634364416 3395289088 4021676933
anova/001/MobeNetV3Large_Adagrad_400_1_5a14 rtx3060 3680501760 3646947328 3110076416 3536228188
anova/001/MobeNetV3Large_AdamW_300_1_0ffa rtx3060 2730491904 2751463424 2353004544 2940899164
anova/001/MobeNetV3Large_Adam_200_1_4e7b rtx3060 1820327936 1937768448 1637875712 2406419005
anova/001/MobeNetV3Large_Adam_500_1_6d22 rtx3060 4580179968 4500488192 3814719488 4001827389
random/MnasNet_AdamW_377_1_7d4e rtx3060 3288334336 3466592256 3225419776 4018027888
random/RegNetX400MF_AdamW_244_0_cd4f rtx4060 1482686464 1407188992 1369440256 2072374149
random/RegNetX400MF_RMSprop_212_0_68b0 rtx4060 1231028224 1228931072 1222639616 2055219445
random/RegNetX400MF_RMSprop_265_0_a2ef rtx4060 1568669696 1470103552 1480589312 2072049090
random/RegNetY400MF_Adam_410_1_9aeb rtx3060 2726297600 2715811840 2810183680 3603274137
random/RegNetY400MF_RMSprop_311_0_b4a9 rtx4060 2348810240 2080374784 2193620992 2438641745
"""


def _run(line: str) -> PublishedRun:
    folder, gpu, real, *said = line.split()
    study, _, name = folder.partition("/")
    model, optimizer, batch, *_ = name.rpartition("/")[2].split("_")
    model = model.replace("MobeNet", "MobileNet")
    run = f"{model}-{optimizer}-{batch}"
    return published("cnn", f"{_STUDIES[study]}/{name}", gpu, run, real, said, _WHY, tuned=model in CHOSEN_WITH)


RUNS = tuple(_run(line) for line in LISTED.split("\n") if line)
